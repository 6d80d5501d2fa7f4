"""What several tests share and no test is."""
