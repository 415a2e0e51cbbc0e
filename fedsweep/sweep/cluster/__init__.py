"""Modules that join a Ray cluster, check its nodes, send files to them and share GPUs among trials."""
