--[[ publish_progress: add an entry to the progress stream of a run, and publish it to its subscribers.
  Key: a stream, id "<attempt>-<ms>", field "said": JSON; "<id> <JSON>" is published to the channel of the same name
  Takes
    id: text
    entry: text       JSON; "": there are no more
    kept: int         entries that stay
    ttl_ms: int       for how long, from now on
  Returns
    subscribers: int  -1: a later entry is there already, so this one was neither added nor published
  Refused when Redis is full
  Called by routing/progress.py: ProgressCommands.publish_command, routing/progress.py: ProgressCommands.end_command
  Cost O(1) ]]

if entry == "" then
  redis.call("PEXPIRE", KEYS[1], ttl_ms)
  return 0
end
local added = redis.pcall("XADD", KEYS[1], "MAXLEN", kept, id, "said", entry)
if type(added) == "table" and added.err then return -1 end
redis.call("PEXPIRE", KEYS[1], ttl_ms)
return redis.call("PUBLISH", KEYS[1], id .. " " .. entry)
