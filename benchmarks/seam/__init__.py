"""What a collective costs through a group of ours, against one that torch alone has made; nothing fails."""
