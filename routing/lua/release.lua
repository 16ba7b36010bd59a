--[[ release: give up leases, one after another, and after each make the next offers in the same step (the hand-off).
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    settings: {breaker_failures: int, breaker_rate: number, breaker_open_ms: int, breaker_open_max_ms: int,
               busy_cooldown_max_ms: int}
      failures in a row, or this rate of them, 0 to 1, open a server's breaker for open_ms, doubled each time in a row
      up to open_max_ms; likewise the cooldown of a slot that was busy, up to busy_cooldown_max_ms
    releases: [{lease: {job_id: text, name: text, owner: text},
                back: flag, cooldown_ms: int, outcome: "ok" | "refused" | "failed" | "busy" | "told" | "",
                draining: {job_id: text, name: text, owner: text},
                offering: {prefix: text, limit: int, room: int, offer_ms: int, claimant: text, lease_ms: int}}]
      lease         its owner is "" where it is an offer that nobody has claimed
      back          the job goes back to its place in its lane; else it has left the room
      cooldown_ms   how long the slot is offered to nobody
      outcome       what the run tells of its server and model; "refused": the server is well, its job is not;
                    "told": it is busy, and cooldown_ms is what it asked for; "": nothing
      draining      under this its slot stays taken; job_id "": it is free
      offering      see lib/offer
  Returns
    answers: [{released: flag,
               offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int, owner: text}]}]
      released      0: it is another's, and left alone; offers are made all the same
  Joins releases
  Clock Redis TIME    Cost O(releases × (log n + groups + free slots))    Upholds LEASE-4, SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch
-- @include lib/slots
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes
-- @include lib/breaker
-- @include lib/lease
-- @include lib/holding
-- @include lib/placement
-- @include lib/offer

-- A moving mean of what runs that end well take of a slot, in ms.
local function note_duration(stats, name, took_ms)
  local mean = tonumber(field(stats, name) or took_ms)
  set_field(stats, name, string.format("%.3f", mean + SMOOTHING * (took_ms - mean)))
end

local function note_run(was, outcome, now)
  local server, model = server_of(was.slot), was.lane.model
  if not field(SERVERS, server) then return end -- it has been removed meanwhile
  local of_server, of_model = stats_key("server", server), stats_key("model", model)
  local is_busy = outcome == "busy" or outcome == "told"
  local told, in_a_row = is_busy and "" or outcome, rules_of(model).failures
  note_outcome(of_server, was.job, told, now, settings)
  if in_a_row > 0 then note_outcome(of_model, was.job, told, now, settings, in_a_row) end
  if outcome == "ok" then
    note_duration(of_model, "run_ms", now - was.since)
    note_duration(of_server, "run_ms:" .. model, now - was.since)
  end
end

-- A slot whose server said "busy", again and again, is tried less and less often; a look at its health may end that.
-- When a server said itself when to come back, only time ends that: see cool_down.
local function cooldown_of(slot, outcome, cooldown_ms, now)
  local stats, name = stats_key("server", server_of(slot)), "busy:" .. slot
  read_hash(stats)
  set_field(stats, "told:" .. slot, outcome == "told" and exact(now + cooldown_ms) or false)
  if outcome ~= "busy" or not is_online_slot(slot) then
    set_field(stats, name, false)
    return cooldown_ms
  end
  local times = add_to_field(stats, name, 1)
  return math.min(cooldown_ms * 2 ^ math.min(times - 1, 30), math.max(cooldown_ms, settings.busy_cooldown_max_ms))
end

-- Answers 1, or 0 for a lease that is another's.
local function let_go(it, now)
  local was, draining = read_lease(it.lease.job_id), it.draining
  if not holds(was, it.lease.name, it.lease.owner) then return 0 end
  local is_let_go = drop_lease(was, now)
  if it.back or was.again then
    add_to_lane(was.lane, was.seq, member_of(was.job, was.created))
    reindex(was.lane, was.constraints)
  end
  if draining.job_id ~= "" then
    write_lease(draining.job_id, draining.name, draining.owner, was.slot, was.lane, was.constraints, was.seq,
      was.created, 0, 0, now, now + it.offering.lease_ms)
  else
    return_slot(was.slot, now, cooldown_of(was.slot, it.outcome, it.cooldown_ms, now), is_let_go)
  end
  if it.outcome ~= "ok" then doubt_loaded(was) end
  note_run(was, it.outcome, now)
  return 1
end

local now, answers = now_ms(), {}
for i, it in ipairs(releases) do answers[i] = { let_go(it, now), make_offers(it.offering, now) } end
write_fields()
return answers
