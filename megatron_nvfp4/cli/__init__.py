"""What the verbs of the command line print. Nothing here is imported before its verb runs."""
