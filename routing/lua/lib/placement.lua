-- placement: which of the servers that may run a job is best.

local CHOICES = 16 -- eligible servers that are compared, those that are free longest

-- The parts of a server's score for a model, and their sum over its weight: the lowest is best.
local function score_of(server, entry, model, now)
  local stats = stats_key("server", server)
  local found = redis.call("HMGET", stats, "taken", "loaded", "run_ms:" .. model)
  local mean = tonumber(redis.call("HGET", stats_key("model", model), "run_ms") or "0")
  local parts = {
    load = math.max(tonumber(found[1] or "0"), 0) / slots_in(entry),
    failures = penalty(stats, now),
    slowness = found[3] and mean > 0 and math.min(math.max(tonumber(found[3]) / mean - 1, -0.5), 2) or 0,
    swap = found[2] and found[2] ~= model and 1 or 0,
  }
  local weight = tonumber(string.match(entry, "^%a+ %d+ (%S+)") or "1")
  parts.total = (1 + parts.load + parts.failures + parts.slowness + parts.swap) / weight
  return parts
end
