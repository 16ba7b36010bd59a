--[[ position: how many jobs of its model come before a waiting one.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lane   ARGV[3] created   ARGV[4] as_last "1": one that would come in now, "0": one that is in
  Returns {"waiting", ahead, run_ms} | {"offered"} | {"absent"}      Writes nothing
    run_ms   mean slot time of the model's latest runs, ms; 0: not known yet
  Cost O(lanes before it log n), of about 512 lanes; with more of them `ahead` is an estimate ]]
-- @include lib/fleet
-- @include lib/fields
-- @include lib/order
-- @include lib/groups
-- @include lib/lanes
-- @include lib/ahead

local job, it = ARGV[1], read_lane(ARGV[2])
local seq = ARGV[4] == "1" and exact(TIER_STEP - 1) or redis.call("ZSCORE", lane_key(it.name), member_of(job, ARGV[3]))
if not seq then
  return { redis.call("EXISTS", lease_key(job)) == 1 and "offered" or "absent" }
end
local run_ms = tonumber(redis.call("HGET", stats_key("model", it.model), "run_ms") or "0")
return { "waiting", count_ahead(it, seq, tonumber(ARGV[3])), math.floor(run_ms) }
