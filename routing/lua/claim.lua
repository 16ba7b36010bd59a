--[[ claim: make an open offer one's own.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lease   ARGV[3] owner, not empty   ARGV[4] lease_ms
  Returns {"claimed", slot, server, number} | {"yours"}: the caller has claimed it before | {"lost"}
  Writes only on "claimed"
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch
-- @include lib/lease

local job, lease, owner = ARGV[1], ARGV[2], ARGV[3]
local held, now = read_lease(job), now_ms()
if holds(held, lease, owner) then return { "yours" } end
if not holds(held, lease, "") then return { "lost" } end
if not is_open(now) then return { "lost" } end -- the slot may be another's by now

redis.call("HSET", lease_key(job), "owner", owner)
redis.call("ZADD", LEASES, exact(now + tonumber(ARGV[4])), job)
note_owner(job, owner)
return { "claimed", held.slot, server_of(held.slot), tonumber(held.offer) }
