"""The step: one replica's work, mapped over the mesh, and what is compiled of it."""
