"""The ways a bucket of gradients can travel: one `BucketExchange` each, and what they share."""
