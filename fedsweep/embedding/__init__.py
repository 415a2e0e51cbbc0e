"""t-SNE of the global model's features, as in Fig. 5 of FedRA: the images, the points and the picture."""
