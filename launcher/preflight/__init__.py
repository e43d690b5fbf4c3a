"""What is known of the hosts before anything is started."""
