"""What every live cluster needs, whatever its jobs run on: this machine (`local`) or another back end."""
