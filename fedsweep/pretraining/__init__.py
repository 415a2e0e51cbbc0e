"""Pre-training of a backbone from scratch on a prepared data set (`fedsweep pretrain`)."""
