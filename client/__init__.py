"""client: the user's side of the door.  `api` speaks to it over HTTP, `terminal` prints what came, made safe."""
