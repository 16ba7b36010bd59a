--[[ play: the simulator's loop.  Runs the scripts of routing unchanged, at simulated times, without a round trip for
  each.  simulated_queue.py defines `scripts` and NOW before it.
  KEYS[1..n]    the fleet's keys
  KEYS[n+1…]    the simulator's: ends (zset job -> ms), runs (hash), lasts (hash job -> ms), loaded (hash server ->
                model), state (hash)
  ARGV[1]       JSON: {claimant, latency_ms, swap_ms, sweep_ms, patience_ms, scripts, templates}
                scripts: act -> name of the script that does it; templates: act -> its arguments, in which
                @job, @lease, @owner and @slot are replaced by those of a run
  ARGV[2] till  the time to stop at, ms; "": when all jobs have ended
  ARGV[3] acts  number of scripts to run at most
  ARGV[4…]      events, sorted by time; of each: at, verb, name, number, count, and `count` words
    arrive      name: a job; number: its run time, ms; words: arguments of enqueue
    down, up    name: a server; number: online slots after it; words: arguments of sync
  Returns {events taken, done, job, slot, start, end, turn, "ended" | "broken"…} ]]

local order = cjson.decode(ARGV[1])
local till, acts = tonumber(ARGV[2]) or math.huge, tonumber(ARGV[3])
local ENDS, RUNS, LASTS, LOADED, STATE = unpack(KEYS, #KEYS - 4)
local FLEET = { unpack(KEYS, 1, #KEYS - 5) }

local stored = redis.call("HMGET", STATE, "running", "waiting", "slots", "sweep", "idle_since")
local running, waiting, slots = tonumber(stored[1] or 0), tonumber(stored[2] or 0), tonumber(stored[3] or 0)
local sweep, idle_since = tonumber(stored[4] or ""), tonumber(stored[5] or "")
local answer = { 0, 0 }

local function text(number) return string.format("%.0f", number) end

local function act(name, words)
  acts = acts - 1
  return scripts[order.scripts[name]](FLEET, words)
end

local function fill_template(name, run)
  local words = {}
  for i, word in ipairs(order.templates[name]) do
    if string.byte(word) == 64 then word = run[string.sub(word, 2)] or word end
    words[i] = word
  end
  return words
end

-- Returns how long a job holds its slot, which depends on the model that its server has loaded.
local function lasts(job, server, model)
  local ms = tonumber(redis.call("HGET", LASTS, job))
  if order.swap_ms == 0 then return ms end
  local before = redis.call("HGET", LOADED, server)
  redis.call("HSET", LOADED, server, model)
  return (before and before ~= model) and ms + order.swap_ms or ms
end

local function start(offers)
  for _, offer in ipairs(offers) do
    local run = { job = offer[1], lease = offer[2], slot = offer[3], owner = offer[7] }
    if run.owner == "" then
      local claimed = act("claim", fill_template("claim", run))
      if not claimed then error("the offer of " .. run.job .. " could not be claimed") end
      run.owner = order.claimant
    end
    local starts = NOW + order.latency_ms
    redis.call("ZADD", ENDS, text(starts + lasts(run.job, offer[4], offer[5])), run.job)
    redis.call("HSET", RUNS, run.job, table.concat({ run.lease, run.owner, run.slot, text(starts), offer[6] }, "\n"))
    running, waiting, idle_since = running + 1, waiting - 1, nil
  end
end

-- Ends the run of `job`.  `how`: "release", or "back": return the job to its place in the queue.
local function stop(job, how, fate)
  local run = { job = job }
  local starts, turn
  run.lease, run.owner, run.slot, starts, turn =
    string.match(redis.call("HGET", RUNS, job), "^(.*)\n(.*)\n(.*)\n(.*)\n(.*)$")
  redis.call("ZREM", ENDS, job)
  redis.call("HDEL", RUNS, job)
  running = running - 1
  for _, value in ipairs({ job, run.slot, starts, text(NOW), turn, fate }) do answer[#answer + 1] = value end
  if fate == "broken" then waiting = waiting + 1 else redis.call("HDEL", LASTS, job) end
  local released = act(how, fill_template(how, run))[1]
  if released[1] == 0 then error("the lease of " .. job .. " was lost") end
  start(released[2])
end

local event = {}

function event.arrive(job, run_ms, words)
  redis.call("HSET", LASTS, job, run_ms)
  waiting = waiting + 1
  start(act("enqueue", words)[2])
end

function event.down(server, online, words)
  act("sync", words)
  slots = tonumber(online)
  for _, job in ipairs(redis.call("ZRANGE", ENDS, 0, -1)) do
    local slot = string.match(redis.call("HGET", RUNS, job), "^.*\n.*\n(.*)\n.*\n.*$")
    if string.match(slot, "^(.*)%-slot%d+$") == server then stop(job, "back", "broken") end
  end
end

function event.up(_, online, words)
  act("sync", words)
  slots = tonumber(online)
  start(act("offer", order.templates.offer))
end

local at = 4 -- index of the next event in ARGV

local function take_event()
  local count = tonumber(ARGV[at + 4])
  event[ARGV[at + 1]](ARGV[at + 2], ARGV[at + 3], { unpack(ARGV, at + 5, at + 4 + count) })
  at = at + 5 + count
  answer[1] = answer[1] + 1
end

while acts > 0 do
  local job, ends = unpack(redis.call("ZRANGE", ENDS, 0, 0, "WITHSCORES"))
  local ended_at, event_at, sweep_at = tonumber(ends) or math.huge, tonumber(ARGV[at]) or math.huge, sweep or math.huge
  local next_at = math.min(ended_at, event_at, sweep_at)
  local idle_ms = (till == math.huge and event_at == math.huge and idle_since and NOW) and NOW - idle_since or 0
  if next_at > till or next_at == math.huge or idle_ms > order.patience_ms then
    answer[2] = 1
    break
  end
  NOW = next_at
  if ended_at == next_at then
    stop(job, "release", "ended")
  elseif sweep_at == next_at then
    sweep = nil
    start(act("offer", order.templates.offer))
  else
    take_event()
  end
  -- Like beat's sweep: offer waiting jobs again, because a cooldown may have ended.
  if waiting > 0 and running < slots then
    sweep = sweep or (math.floor(NOW / order.sweep_ms) + 1) * order.sweep_ms
    if running == 0 then idle_since = idle_since or NOW end
  end
end

redis.call("HSET", STATE, "running", running, "waiting", waiting, "slots", slots, "sweep", sweep and text(sweep) or "",
  "idle_since", idle_since and text(idle_since) or "")
return answer
