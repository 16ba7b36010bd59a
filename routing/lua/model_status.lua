--[[ model_status: how many jobs of a model wait, and what keeps them from starting.
  Keys: kinds, lanes, rules, free, leases, stats, meta
  Takes
    account: text           "<tenant>|<model>"
    max_free: int           count free slots up to this number
  Returns
    own: int, all_tenants: int      jobs that wait: of this tenant, of all
    run_ms: int | None      mean slot time of the model's latest runs; None: unknown
    free: int               free slots of servers that serve the model; 0 while jobs of it wait
    state: text             of the model: online, draining, paused, frozen
    breaker: "closed" | "open" | "half_open" | "probing", open_until_ms: int, open_why: text      of the model
  Writes nothing
  Called by routing/queue/queues.py: Queues.model_status_command
  Clock Redis TIME    Cost O(kinds of servers of the model); O(1) if max_free is 0, or jobs wait ]]
-- @include lib/now_ms
-- @include lib/rules
-- @include lib/server_stats

local function count_free(model)
  local found = 0
  for _, kind in ipairs(redis.call("SMEMBERS", model_kinds_key(model))) do
    found = found + redis.call("ZCARD", free_key(kind))
    if found >= max_free then return max_free end
  end
  return found
end

local model = model_of(account)
local waiting, free = get_number(META, "waiting:" .. model), 0
if waiting == 0 and max_free > 0 then free = count_free(model) end
local stats = stats_key("model", model)
local breaker, run_ms = breaker_of(stats), math.ceil(get_number(stats, "run_ms"))
return { tonumber(redis.call("HGET", LANES, account) or "0"), waiting,
  run_ms > 0 and run_ms, free, rules_of(model).state,
  breaker_state(breaker, now_ms()), breaker.until_ms, breaker.why }
