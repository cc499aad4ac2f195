"""What kvprobe does to each server, one file a server; see README.md here for what each changes and never touches."""
