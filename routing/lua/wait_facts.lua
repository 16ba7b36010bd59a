--[[ wait_facts: what stands between a job and its start.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lane   ARGV[3] created
  Returns {now_ms, place, ahead, run_ms, obstacle, held, limit, state, breaker, open_until_ms, before}
    place     "waiting" | "offered" | "absent"
    obstacle  tenant_paused, tenant_frozen or tenant_slots; empty: nothing is in the tenant's way, which
              holds `held` slots and may hold `limit` (0: any number)
    state     of the model: online, draining, paused, frozen; its breaker: see breakers
    before    up to five jobs of its own lane that come just before it, the next one last
  Writes nothing
  Clock Redis TIME    Cost as position ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes
-- @include lib/breaker
-- @include lib/ahead

local job, it, now = ARGV[1], read_lane(ARGV[2]), now_ms()
local rules, stats = rules_of(it.model), stats_key("model", it.model)
local seq = redis.call("ZSCORE", lane_key(it.name), member_of(job, ARGV[3]))
local place = seq and "waiting" or (redis.call("EXISTS", lease_key(job)) == 1 and "offered" or "absent")
local ahead = seq and count_ahead(it, seq, tonumber(ARGV[3])) or 0

local before = {}
local rank = seq and redis.call("ZRANK", lane_key(it.name), member_of(job, ARGV[3])) or 0
for _, member in ipairs(rank > 0 and redis.call("ZRANGE", lane_key(it.name), math.max(rank - 5, 0), rank - 1) or {}) do
  before[#before + 1] = read_member(member)
end
local _, limit = terms_of(it.account, rules)
local breaker = breaker_of(stats)
return { now, place, ahead, math.floor(tonumber(redis.call("HGET", stats, "run_ms") or "0")),
  obstacle(it.tenant, it.account, rules) or "", tonumber(redis.call("HGET", HELD, it.account) or "0"), limit,
  rules.state, breaker_state(breaker, now), breaker.until_ms, before }
