-- rounds: the tenant that has had the fewest runs since jobs wait is next, and its most urgent job.
local rounds = new_policy("rounds")

function rounds.account_key(lane) return tonumber(redis.call("ZSCORE", tags_key(lane.model), lane.tenant) or "0") end

function rounds.account_step() return 1 end

function rounds.charge_offer(lane)
  redis.call("ZINCRBY", tags_key(lane.model), 1, lane.tenant)
  return 0
end

function rounds.forget(model) redis.call("DEL", tags_key(model)) end
