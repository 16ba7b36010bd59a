--[[ backlog: how many jobs of one tenant wait for a model, how many of all, and what they wait for.
  Keys: lanes, free, stats, meta
  Takes
    account: text           "<tenant>|<model>"
  Returns
    own: int, everyones: int
    run_ms: int | None      mean slot time of the model's latest runs; None: not known yet
    free: int               slots of the fleet
  Writes nothing
  Cost O(1) ]]
-- @include lib/fleet

local model = model_of(account)
local run_ms = math.ceil(tonumber(redis.call("HGET", stats_key("model", model), "run_ms") or "0"))
return { tonumber(redis.call("HGET", LANES, account) or "0"),
  tonumber(redis.call("HGET", META, "waiting:" .. model) or "0"), run_ms > 0 and run_ms,
  redis.call("ZCARD", FREE) }
