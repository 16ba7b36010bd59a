-- placement: which of the servers that may run a job is best.

-- The parts of a server's score for a model, and their sum over its weight: the lowest is best.
local function score_of(server, entry, model, now)
  local stats = stats_key("server", server)
  local has, mean = read_hash(stats), number_in_field(stats_key("model", model), "run_ms")
  local own = has["run_ms:" .. model]
  local parts = {
    load = math.max(tonumber(has.taken or "0"), 0) / slots_in(entry),
    failures = penalty(stats, now),
    slowness = own and mean > 0 and math.min(math.max(tonumber(own) / mean - 1, -0.5), 2) or 0,
    swap = has.loaded and has.loaded ~= model and 1 or 0,
  }
  local weight = tonumber(string.match(entry, "^%a+ %d+ (%S+)") or "1")
  parts.total = (1 + parts.load + parts.failures + parts.slowness + parts.swap) / weight
  return parts
end
