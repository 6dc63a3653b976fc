"""Ways into training loops that are not the script's own. Each module imports its framework, nothing imports them."""
