"""The image data sets of the benchmark streams, as their authors or TensorFlow Datasets publish
them."""
