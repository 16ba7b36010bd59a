"""local: everything on one machine, in the foreground.

`plan` reads the settings, `home` keeps the state folder, `ports` looks before anything is started, `valkey` finds one;
`supervisor` starts, watches, restarts and stops the processes (`children`), `signals` tell it when, `guardian` ends
them if it cannot; `launcher` is the order in which all of that happens, `demo` what is shown then, `errors` what can
be in the way.  Knows nothing of jobs; what it runs stands in the Procfile.
"""
