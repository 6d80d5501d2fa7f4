"""`hmpx.compare`: measures what op lists do to a training, and finds which ops must be in FP32."""
