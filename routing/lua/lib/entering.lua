-- entering: queued jobs go into their lanes.

-- Put in entries of {lane, job: {constraints, seq, id, created_ms}}; answers how many were not there yet.  A job that
-- holds a lease goes to its place when that is released.
local function put_in(entries)
  local ids, lanes, added = {}, {}, 0
  for n, entry in ipairs(entries) do ids[n] = entry.job.id end
  local leased = #ids > 0 and redis.call("ZMSCORE", LEASES, unpack(ids)) or {}
  for n, entry in ipairs(entries) do
    local job, name = entry.job, entry.lane
    if leased[n] then
      -- Its last run has ended in the record and not freed its slot yet: the job goes to its place when that happens.
      if redis.call("HGET", lease_key(job.id), "owner") ~= "" then
        redis.call("HSET", lease_key(job.id), "again", "1")
      end
    else
      lanes[name] = lanes[name] or { lane = read_lane(name), constraints = job.constraints, members = {} }
      local members = lanes[name].members
      members[#members + 1], members[#members + 2] = job.seq, member_of(job.id, job.created_ms)
    end
  end
  for _, entering in pairs(lanes) do
    local more = add_to_lane(entering.lane, unpack(entering.members))
    if more > 0 then
      read_rules(entering.lane)
      reindex(entering.lane, entering.constraints)
    end
    added = added + more
  end
  return added
end
