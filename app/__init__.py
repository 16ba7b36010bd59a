"""app: the door.  Parses, calls, answers; decides nothing.

web          the process: connections and threads       factory      the application
api          a module for each heading                  auth         who may come in
page         what people open, at `/`
schemas      what is asked                              answers      what is answered, each field once
job_answers, registry_answers   about jobs; about servers, models and tenants
reading      requests, strictly                         batch        many jobs at once
errors       every refusal as a problem                 openapi      the document
context      what views share                           admin        what administrators' views share
describing   descriptions of servers, checked           paging       pages of lists
later        what a view leaves to the server           readiness    whether other parts answer
metrics      figures for Prometheus                     config       settings
addresses    of servers, as operators give them         kinds        of servers, read and written
removal      removals, read and written
defaults     of kinds and of all models, read and written
sealed       secrets by name, read and written          receivers    webhooks of tenants, read and written
"""
