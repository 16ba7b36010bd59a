--[[ tenant_waiting: how many jobs of a tenant wait in a fleet.
  Keys: lanes
  Takes
    accounts: [text]      "<tenant>|<model>", of the fleet's models
  Returns
    waiting: int
  Writes nothing
  Called by routing/admission/submit_limits.py: LimitContext.tenant_waiting_command
  Cost O(models) ]]
-- @include lib/keys

local waiting = 0
for _, account in ipairs(accounts) do waiting = waiting + tonumber(redis.call("HGET", LANES, account) or "0") end
return waiting
