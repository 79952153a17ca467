"""ALFWorld, compiled: game files in, a pure and restorable world out. `games` is the way in."""
