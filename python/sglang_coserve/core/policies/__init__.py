"""What differs between scheduling policies, one file each."""
