--[[ release: give up a lease, and make the next offers in the same step (the hand-off).
  KEYS[1..8]  the fleet's keys, see lib/fleet
  ARGV[1] job       ARGV[2] lease   ARGV[3] owner: "" for an offer that nobody has claimed
  ARGV[4] back      "1": the job goes back to its place in its lane, "0": it has left the room
  ARGV[5] rest_ms   how long the slot is offered to nobody
  ARGV[6] prefix    random text that makes the names of new leases unique
  ARGV[7] limit     offers to make at most
  ARGV[8] offer_ms  how long an open offer stands
  ARGV[9] taker     who takes the first of them at once, for ARGV[10] lease_ms; "": nobody
  Returns {"released" | "lost", {job, lease, slot, server, model, number, owner}…}
  On "lost" the lease is left alone; offers are made all the same
  Clock Redis TIME    Cost O(log n)    Upholds LEASE-4, SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/lease
-- @include lib/offer

local job, now = ARGV[1], now_ms()
local answer = "lost"
if is_held(job, ARGV[2], ARGV[3]) then
  local was = drop_lease(job)
  if ARGV[4] == "1" then
    -- The lane's own offset may be newer than the lease: the policy may have changed during the run.
    put_in_lane(was.lane, redis.call("HGET", OFFSETS, was.lane) or was.offset, was.seq, job)
  end
  return_slot(was.slot, now, tonumber(ARGV[5]))
  answer = "released"
end
return { answer, make_offers(tonumber(ARGV[7]), ARGV[6], now, tonumber(ARGV[8]), ARGV[9], tonumber(ARGV[10])) }
