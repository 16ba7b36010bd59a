--[[ release: give up a lease, and make the next offers in the same step (the hand-off).
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    lease: {job_id: text, name: text, owner: text}      owner "": an offer that nobody has claimed
    back: flag              the job goes back to its place in its lane; else it has left the room
    cooldown_ms: int        how long the slot is offered to nobody
    outcome: "ok" | "failed" | "busy" | ""              what the run tells of its server and model; "": nothing
    settings: {breaker_failures: int, breaker_rate: number, breaker_open_ms: int, breaker_open_max_ms: int,
               busy_cooldown_max_ms: int}
      failures in a row, or this rate of them, 0 to 1, open a server's breaker for open_ms, doubled each time in a row
      up to open_max_ms; likewise the cooldown of a slot that was busy, up to busy_cooldown_max_ms
    draining: {job_id: text, name: text, owner: text}      under this its slot stays taken; job_id "": it is free
    offering: {prefix: text, limit: int, room: int, offer_ms: int, claimant: text, lease_ms: int}      see lib/offer
  Returns
    released: flag          0: it is another's, and left alone; offers are made all the same
    offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int, owner: text}]
  Clock Redis TIME    Cost O(log n + groups + free slots)    Upholds LEASE-4, SLOT-2 ]]
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
  local mean = tonumber(read_hash(stats)[name] or took_ms)
  set_field(stats, name, string.format("%.3f", mean + SMOOTHING * (took_ms - mean)))
end

local function note_run(was, now)
  if not field(SERVERS, server_of(was.slot)) then return end -- it has been removed meanwhile
  local server, model = stats_key("server", server_of(was.slot)), stats_key("model", was.lane.model)
  local told = outcome == "busy" and "" or outcome
  note_outcome(server, was.job, told, now, settings)
  local in_a_row = rules_of(was.lane.model).failures
  if in_a_row > 0 then
    -- Of a model only the streak counts: other servers may be well.
    settings.breaker_failures, settings.breaker_rate = in_a_row, 2
    note_outcome(model, was.job, told, now, settings)
  end
  if outcome == "ok" then
    note_duration(model, "run_ms", now - was.since)
    note_duration(server, "run_ms:" .. was.lane.model, now - was.since)
  end
end

-- A slot whose server said "busy", again and again, is tried less and less often; a look at its health may end that.
local function cooldown_of(slot)
  local stats, name = stats_key("server", server_of(slot)), "busy:" .. slot
  read_hash(stats)
  if outcome ~= "busy" or not is_online_slot(slot) then
    set_field(stats, name, false)
    return cooldown_ms
  end
  local times = add_to_field(stats, name, 1)
  return math.min(cooldown_ms * 2 ^ math.min(times - 1, 30), math.max(cooldown_ms, settings.busy_cooldown_max_ms))
end

local now, was = now_ms(), read_lease(lease.job_id)
local released = holds(was, lease.name, lease.owner)
if released then
  local is_let_go = drop_lease(was, now)
  if back or was.again then
    add_to_lane(was.lane, was.seq, member_of(was.job, was.created))
    reindex(was.lane, was.constraints)
  end
  if draining.job_id ~= "" then
    write_lease(draining.job_id, draining.name, draining.owner, was.slot, was.lane, was.constraints, was.seq,
      was.created, 0, 0, now, now + offering.lease_ms)
  else
    return_slot(was.slot, now, cooldown_of(was.slot), is_let_go)
  end
  note_run(was, now)
end
local offers = make_offers(offering, now)
write_fields()
return { released and 1 or 0, offers }
