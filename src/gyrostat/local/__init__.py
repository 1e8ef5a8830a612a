"""A cluster on this machine: real jobs on its devices, under the one scheduling loop, with durable state."""
