--[[ swaps: whether a server's last job was of another model when it was given this one.
  Keys: leases
  Takes
    lease: {job_id: text, name: text}
  Returns
    swaps: flag     also where its last job is not known: of a server's first, and of a lease that was written again
  Writes nothing
  Cost O(1) ]]
-- @include lib/fleet

local found = redis.call("HMGET", lease_key(lease.job_id), "lease", "offer", "swap")
local is_known = found[1] == lease.name and found[2] ~= "0"
return (not is_known or found[3] == "1") and 1 or 0
