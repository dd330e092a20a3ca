"""What a run did and why: at present where its time went (profile.py)."""
