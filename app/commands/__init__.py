"""commands: what the command line can do.  `local` works on this machine, `jobs` and `admin` ask the API."""
