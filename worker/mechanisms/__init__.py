"""The three things done to records before anything leaves: drawn into batches, clipped, noised."""
