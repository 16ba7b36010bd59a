--[[ release: release leases, one after another, and after each make the next offers in the same step (the handover).
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    settings: {breaker_failures: int, breaker_rate: number, breaker_open_ms: int, breaker_open_max_ms: int,
               busy_cooldown_max_ms: int}
      failures in a row, or this rate of them, 0 to 1, open a server's breaker for open_ms, doubled each time in a row
      up to open_max_ms; likewise the cooldown of a slot that was busy, up to busy_cooldown_max_ms
    releases: [{lease: {job_id: text, name: text, owner: text},
                return_to_lane: flag, cooldown_ms: int,
                signal: "ok" | "refused" | "failed" | "busy" | "retry_after" | "",
                quarantine: {job_id: text, name: text, owner: text},
                offering: {prefix: text, limit: int, capacity: int, offer_ms: int, claimant: text, lease_ms: int}}]
      lease           its owner is "" if it is an offer that no worker has claimed
      return_to_lane  the job returns to its place in its lane; else it has left the queue
      cooldown_ms     how long the slot is not offered
      signal          what the run says of its server and model; "refused": the server is well, the job is not;
                      "retry_after": the server is busy, and asked for cooldown_ms; "": nothing
      quarantine      the lease under which the slot stays taken; job_id "": it is free
      offering        see lib/offers
  Returns
    answers: [{released: flag,
               offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int,
                         owner: text, changes_model: flag}]}]
      released      0: the lease is another's, and left as it is; offers are made all the same
  Joins releases
  Called by routing/queue/leases.py: Leases.release_command
  Clock Redis TIME    Cost O(releases × (log n + groups + free slots))    Upholds LEASE-4, SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/offers

-- Update a moving mean of the slot time of runs that end well, in ms.
local function record_duration(stats, name, took_ms)
  local mean = tonumber(get_field(stats, name) or took_ms)
  set_field(stats, name, string.format("%.3f", mean + SMOOTHING * (took_ms - mean)))
end

local function record_run(lease, signal, used_ms, now)
  local server, model = server_of(lease.slot), lease.lane.model
  if not get_field(SERVERS, server) then return end -- it has been removed meanwhile
  local of_server, of_model = stats_key("server", server), stats_key("model", model)
  if signal == "retry_after" or signal == "busy" then
    signal = "" -- it says nothing of the server's health
  end
  local in_a_row = rules_of(model).failures
  record_signal(of_server, lease.job, signal, now, settings)
  if in_a_row > 0 then record_signal(of_model, lease.job, signal, now, settings, in_a_row) end
  if signal == "ok" then
    record_duration(of_model, "run_ms", used_ms)
    record_duration(of_server, "run_ms:" .. model, used_ms)
  end
end

-- The cooldown of a slot whose server is busy doubles each time in a row; a report of its health may end it
-- (cool_down).  If the server named the time itself, only time ends the cooldown.
local function busy_cooldown(slot, signal, cooldown_ms, now)
  local stats, name = stats_key("server", server_of(slot)), "busy:" .. slot
  load_hash(stats)
  set_field(stats, "told:" .. slot, signal == "retry_after" and integer_text(now + cooldown_ms) or false)
  if signal ~= "busy" or not is_online_slot(slot) then
    set_field(stats, name, false)
    return cooldown_ms
  end
  local times = increment_field(stats, name, 1)
  return math.min(cooldown_ms * 2 ^ math.min(times - 1, 30), math.max(cooldown_ms, settings.busy_cooldown_max_ms))
end

-- Returns 1; 0 for a lease that is another's.
local function release_one(one, now)
  local lease, quarantine = read_lease(one.lease.job_id), one.quarantine
  if not is_holder(lease, one.lease.name, one.lease.owner) then return 0 end
  local holds_no_lease, used_ms = delete_lease(lease, now)
  if one.return_to_lane or lease.again then
    add_to_lane(lease.lane, lease.seq, lane_member(lease.job, lease.created))
    reindex(lease.lane, lease.constraints)
  end
  if quarantine.job_id ~= "" then
    write_lease(quarantine.job_id, quarantine.name, quarantine.owner, lease.slot, lease.lane, lease.constraints,
      lease.seq, lease.created, 0, 0, now, now + one.offering.lease_ms)
  else
    make_slot_available(lease.slot, now, busy_cooldown(lease.slot, one.signal, one.cooldown_ms, now), holds_no_lease)
  end
  if one.signal ~= "ok" then clear_loaded_model(lease) end
  record_run(lease, one.signal, used_ms, now)
  return 1
end

local now, answers = now_ms(), {}
for i, one in ipairs(releases) do answers[i] = { release_one(one, now), make_offers(one.offering, now) } end
flush_hashes()
return answers
