--[[ backlog: how many jobs of one tenant wait for a model, how many of all, and what they wait for.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] account: "<tenant>|<model>"
  Returns {jobs, jobs_of_all, run_ms, free}; run_ms 0: not known yet; free: slots of the fleet      Writes nothing
  Cost O(1) ]]
-- @include lib/fleet

local jobs = tonumber(redis.call("HGET", LANES, ARGV[1]) or "0")
local model = model_of(ARGV[1])
local run_ms = tonumber(redis.call("HGET", stats_key("model", model), "run_ms") or "0")
return { jobs, tonumber(redis.call("HGET", META, "waiting:" .. model) or "0"), math.ceil(run_ms),
  redis.call("ZCARD", FREE) }
