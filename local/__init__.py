"""local: everything on one machine, in the foreground.

`plan` reads the settings, `home` keeps the state folder, `ports` looks before anything is started, `supervisor`
starts, watches, restarts and stops the processes, `launcher` is the order in which all of that happens.  Knows
nothing of jobs; what it runs stands in the Procfile.
"""
