"""app: the door.  Parses, calls, answers; decides nothing.

web          the process: connections and threads       factory      the application
api          a module for each heading                  auth         who may come in
schemas      what is read and written                   views        values of the record as JSON
reading      JSON, strictly                             batch        many jobs at once
errors       every refusal as a problem                 openapi      the document
context      what views share                           admin        what administrators' views share
describing   descriptions of servers, checked           paging       pages of lists
later        what a view leaves to the server           probes       whether other parts answer
metrics      figures for Prometheus                     config       settings
addresses    of servers, as operators give them         kinds        of servers, read and written
sealed       secrets by name, read and written
"""
