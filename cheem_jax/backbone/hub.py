"""Weights from the hub's `timm/` repositories, through huggingface_hub and its cache."""

import json
from pathlib import Path


def download(timm_name: str) -> tuple[Path, dict, str]:
    """The model's safetensors file in the local cache, its `config.json`, and what to call the source.

    Files that the cache holds are used without asking the network. Raises FileNotFoundError where the hub
    cannot be reached or has no such model.
    """
    repository = repository_of(timm_name)
    way_out = (
        f"pass a local file instead (--weights FILE), e.g. model.safetensors from https://huggingface.co/{repository}"
    )
    from huggingface_hub.errors import RepositoryNotFoundError  # slow to import, and mostly not needed

    try:
        weights = _cached_or_fetched(repository, "model.safetensors")
        config = json.loads(_cached_or_fetched(repository, "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("its config.json is no JSON object")
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"the hub has no model {repository!r}: check the name, or {way_out}") from error
    except Exception as error:  # the client's error classes differ between its releases
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(f"cannot download {repository!r} ({reason}); {way_out}") from error
    return weights, config, f"hub:{repository}"


def repository_of(timm_name: str) -> str:
    """Where the hub keeps a model; the QuickGELU variants share the weights of their plain names."""
    return f"timm/{timm_name.replace('_clip_quickgelu_', '_clip_')}"


def _cached_or_fetched(repository: str, filename: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, filename)
    if isinstance(cached, str):
        return Path(cached)
    # Asked once and without retries: the download itself would try a missing network for half a minute.
    get_hf_file_metadata(hf_hub_url(repository, filename))
    return Path(hf_hub_download(repository, filename))
