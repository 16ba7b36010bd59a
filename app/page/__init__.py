"""app.page: what people open, at `/`.  Server-rendered; it works without script, and is live with it.

entrance     log-in, visits, screens                     visitor      who looks, and what their form says
sessions     the cookie of a visit                       attempts     how often keys may be tried
frame        what stands around every screen             render       templates, and how values look
plots        small plots as SVG
screens      all of them together
overview     how all models stand                        models       one of them
servers      all of them, and one                        removal      removals of models and servers
jobs         the list, and the life of one               batches      jobs that came together
dead         jobs that wait for a person                 tenants      who may hold and send what
webhooks     who is told, and what was given up          settings     those in force
audit        who did what

To add a screen: its view with `@screen` in the file of its heading, its template, and its row in frame.WAYS.  A view
asks the API's own views, or a function of insight, and decides nothing.
"""
