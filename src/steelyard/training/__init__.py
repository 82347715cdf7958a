"""What training engines share."""
