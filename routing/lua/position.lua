--[[ position: how many jobs of its model come before a waiting one.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lane   ARGV[3] created   ARGV[4] as_last "1": one that would come in now, "0": one that is in
  Returns {"waiting", ahead, run_ms} | {"offered"} | {"absent"}      Writes nothing
    run_ms   mean slot time of the model's latest runs, ms; 0: not known yet
  Cost O(lanes before it log n), of about 512 lanes; with more of them `ahead` is an estimate ]]
-- @include lib/fleet
-- @include lib/fields
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes
-- @include lib/ahead

local job, it = ARGV[1], read_lane(ARGV[2])
local ahead, run_ms = place_of(it, job, ARGV[3], ARGV[4] == "1")
if ahead then return { "waiting", ahead, run_ms } end
return { redis.call("EXISTS", lease_key(job)) == 1 and "offered" or "absent" }
