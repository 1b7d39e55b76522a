"""The image data sets of the benchmark streams, from what their authors or TensorFlow Datasets give
out."""
