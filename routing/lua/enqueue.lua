--[[ enqueue: put queued jobs in the waiting room, and offer what can run at once, in the same step.
  KEYS[1..8]  the fleet's keys, see lib/fleet
  ARGV[1] prefix   random text that makes the names of new leases unique
  ARGV[2] limit    offers to make at most
  ARGV[3] offer_ms how long an offer stays open
  ARGV[4…]         lane, offset, seq, job of each job
  Returns {added, {job, lease, slot, server, model, number, owner}…}
  Idempotent: a job that waits or holds a lease already is left as it is
  Clock Redis TIME    Cost O(log n) a job    Upholds ORDER-1, SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/offer

local added, longer = 0, {}
for i = 4, #ARGV, 4 do
  local lane, offset, seq, job = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  if redis.call("EXISTS", lease_key(job)) == 0 and not redis.call("ZSCORE", lane_key(lane), job) then
    redis.call("ZADD", lane_key(lane), seq, job)
    longer[lane] = offset
    added = added + 1
  end
end
for lane, offset in pairs(longer) do
  redis.call("HSET", OFFSETS, lane, offset)
  reindex(lane)
end
return { added, make_offers(tonumber(ARGV[2]), ARGV[1], now_ms(), tonumber(ARGV[3]), "", 0) }
