--[[ release: give up a lease, and make the next offers in the same step (the hand-off).
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] job       ARGV[2] lease   ARGV[3] owner: "" for an offer that nobody has claimed
  ARGV[4] back      "1": the job goes back to its place in its lane, "0": it has left the room
  ARGV[5] rest_ms   how long the slot is offered to nobody
  ARGV[6] prefix    random text that makes the names of new leases unique
  ARGV[7] limit     offers to make at most
  ARGV[8] room      how many offers may be open at once: runs that workers have room for
  ARGV[9] offer_ms  how long an open offer stands
  ARGV[10] taker    who takes the first of them at once, for ARGV[11] lease_ms; "": nobody
  ARGV[12] outcome  "ok", "failed", "busy": what the run tells of its server and model; "": nothing
  ARGV[13] failures in a row that open a server's breaker   ARGV[14] rate of failures that opens one, 0 to 1
  ARGV[15] open_ms  for how long the first time; doubled each time in a row up to ARGV[16] open_max_ms
  ARGV[17] rest_max_ms: how far the rest of a slot that was busy is doubled, each time in a row
  ARGV[18] draining the name under which its slot stays taken, with ARGV[19] lease and ARGV[20] owner;
           "": the slot is free
  Returns {"released" | "lost", {job, lease, slot, server, model, number, owner}…}
  On "lost" the lease is left alone; offers are made all the same
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

local function note_run(was, outcome, now)
  if not field(SERVERS, server_of(was.slot)) then return end -- it has been removed meanwhile
  local server, model = stats_key("server", server_of(was.slot)), stats_key("model", was.lane.model)
  local settings = { failures = tonumber(ARGV[13]), rate = tonumber(ARGV[14]), open_ms = tonumber(ARGV[15]),
    open_max_ms = tonumber(ARGV[16]) }
  note_outcome(server, was.job, outcome, now, settings)
  local failures = rules_of(was.lane.model).failures
  if failures > 0 then
    settings.failures, settings.rate = failures, 2 -- of a model only the streak counts: other servers may be well
    note_outcome(model, was.job, outcome, now, settings)
  end
  if outcome == "ok" then
    note_duration(model, "run_ms", now - was.since)
    note_duration(server, "run_ms:" .. was.lane.model, now - was.since)
  end
end

-- A slot whose server said "busy", again and again, is tried less and less often; health may wake it before.
local function rest_of(slot, outcome)
  local stats, name, rest_ms = stats_key("server", server_of(slot)), "busy:" .. slot, tonumber(ARGV[5])
  read_hash(stats)
  if outcome ~= "busy" or not is_online_slot(slot) then
    set_field(stats, name, false)
    return rest_ms
  end
  local times = add_to_field(stats, name, 1)
  return math.min(rest_ms * 2 ^ math.min(times - 1, 30), math.max(rest_ms, tonumber(ARGV[17])))
end

local now, was = now_ms(), read_lease(ARGV[1])
local answer = "lost"
if holds(was, ARGV[2], ARGV[3]) then
  local is_let_go = drop_lease(was, now)
  if ARGV[4] == "1" or was.again then
    add_to_lane(was.lane, was.seq, member_of(was.job, was.created))
    reindex(was.lane, was.needs)
  end
  if (ARGV[18] or "") ~= "" then
    write_lease(ARGV[18], ARGV[19], ARGV[20], was.slot, was.lane, was.needs, was.seq, was.created, 0, 0, now,
      now + tonumber(ARGV[11]))
  else
    return_slot(was.slot, now, rest_of(was.slot, ARGV[12]), is_let_go)
  end
  note_run(was, ARGV[12] == "busy" and "" or ARGV[12], now)
  answer = "released"
end
local limit, room, offer_ms, lease_ms = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[11])
local offers = make_offers(limit, room, ARGV[6], now, offer_ms, ARGV[10], lease_ms)
write_fields()
return { answer, offers }
