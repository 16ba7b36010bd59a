--[[ server_status: the slots, the breaker and the scores of each server of a fleet.
  Keys: free, cooling, leases, servers, stats, meta
  Returns
    servers: [{server: text, absent: flag, free: int, cooling: int, taken: int,
               cooldown_until_ms: int, breaker: "closed" | "open" | "half_open" | "probing",
               open_until_ms: int, open_why: text, opened: int,
               loaded: text, swaps: int, away_since_ms: int, away_why: text, silent_since_ms: int,
               scores: {text: {load: number, failures: number, slowness: number, swap: number, silence: number,
                        total: number}}}]
      absent             a node that is not connected, or takes no jobs
      cooldown_until_ms  when the first of its slots in cooldown is offered again; 0: none is in cooldown
      away_since_ms      since when it cannot be reached; 0: its last call or health check was answered
      away_why           what its health check says is wrong; empty: it did not answer
      silent_since_ms    since when its health check is not answered in time; 0: the last one was
      scores     by model; the lowest total is best
      open_until_ms, open_why, opened   when the breaker's next probe is due; what opened it: runs failed one after
                 another (failures), too many of them did (rate), or the last probe did (probe); how often in a row; 0
                 or empty: it is closed
  Writes nothing
  Called by routing/queries/server_status.py: _status_command
  Clock Redis TIME    Cost O(slots + servers models) ]]
-- @include lib/now_ms
-- @include lib/server_stats

local now, found = now_ms(), {}

local function count(index)
  local slots, first = {}, {}
  local all = redis.call("ZRANGE", index, 0, -1, "WITHSCORES")
  for i = 1, #all, 2 do
    local server = server_of(all[i])
    slots[server] = (slots[server] or 0) + 1
    first[server] = first[server] or all[i + 1]
  end
  return slots, first
end

local function scores(server, entry)
  local rows = {}
  for model in models_in(entry) do
    local parts = server_score(server, entry, model, now)
    local row = {}
    for n, part in ipairs({ "load", "failures", "slowness", "swap", "silence", "total" }) do
      row[n] = string.format("%.3f", parts[part])
    end
    rows[#rows + 1] = { model, row }
  end
  return rows
end

local free, _ = count(FREE)
local cooling, cooled = count(COOLING)
local servers = redis.call("HGETALL", SERVERS)
for i = 1, #servers, 2 do
  local server, stats = servers[i], stats_key("server", servers[i])
  local breaker = breaker_of(stats)
  local fields = load_hash(stats)
  local absent = string.find(servers[i + 1], "node ", 1, true) == 1 and not online_server(server)
  found[#found + 1] = { server, absent and 1 or 0, free[server] or 0, cooling[server] or 0,
    tonumber(fields.taken or "0"), tonumber(cooled[server] or "0"), breaker_state(breaker, now), breaker.until_ms,
    breaker.why, tonumber(fields.opened or "0"), fields.loaded or "", tonumber(fields.swaps or "0"),
    tonumber(fields.away_since or "0"), fields.away_why or "", tonumber(fields.silent_since or "0"),
    scores(server, servers[i + 1]) }
end
return found
