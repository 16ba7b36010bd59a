-- offers: take the next job and a slot that may run it, together or neither (SLOT-2, LEASE-1).
-- @include lib/epoch
-- @include lib/leases
-- @include lib/server_stats

local LOOKED_AT = 16 -- classes, lanes of each, and jobs of each lane: candidates for a probe

-- Return server -> number of its leases whose slot was removed or is held by another lease.  So many of its free slots
-- are not offered (SLOT-1).
local function excess_by_server()
  if not get_field(META, "excess") then return {} end
  local found, excess = redis.call("HGETALL", excess_key()), {}
  for i = 1, #found, 2 do excess[found[i]] = tonumber(found[i + 1]) end
  return excess
end

-- The servers with free slots, the longest free first, each {name, entry, stats, slots in that order, next}.  They are
-- read as far as nth_server needs them.  A server is listed again if all its slots were taken before more were read.
local function free_servers()
  return { by_name = {}, excess = excess_by_server(), read = 0, left = 0, whole = false }
end

-- Return whether there were more free slots.
local function read_more(servers)
  if servers.whole then return false end
  local read_at_once = 64
  local slots = redis.call("ZRANGE", FREE, servers.read, servers.read + read_at_once - 1)
  local by_name, excess = servers.by_name, servers.excess
  servers.read, servers.whole = servers.read + #slots, #slots < read_at_once
  for _, slot in ipairs(slots) do
    local name = server_of(slot)
    if by_name[name] == nil then
      local entry, stats = online_server(name), stats_key("server", name)
      by_name[name] = entry and { name = name, entry = entry, stats = stats, slots = {}, next = 1 } or false
    end
    local server = by_name[name]
    if (excess[name] or 0) > 0 then
      excess[name] = excess[name] - 1
    elseif server then
      if not server.slots[server.next] then servers[#servers + 1] = server end
      server.slots[#server.slots + 1] = slot
      servers.left = servers.left + 1
    end
  end
  return #slots > 0
end

-- Return nil if there are fewer.
local function nth_server(servers, n)
  while not servers[n] and read_more(servers) do end
  return servers[n]
end

local function take_slot(servers, server)
  local slot = server.slots[server.next]
  server.next = server.next + 1
  redis.call("ZREM", FREE, slot)
  servers.read, servers.left = servers.read - 1, servers.left - 1
  return slot
end

local function has_free_slot(servers)
  while servers.left == 0 and read_more(servers) do end
  return servers.left > 0
end

-- Return the rank of a model's next job among those of other models: by priority, then by acceptance.  `by_time`: by
-- the time of acceptance, as scores of another meaning cannot be compared.
local function turn_of(lane, model, by_time, now)
  local own, policy = parse_lane(lane.name).priority, policy_of(model.name)
  local priority = policy.priority_among_models(own, lane.key, model.rules, now)
  local head = redis.call("ZRANGE", lane_key(lane.name), 0, 0, "WITHSCORES")
  local accepted = by_time and select(2, parse_lane_member(head[1])) or tonumber(head[2])
  return priority * PRIORITY_STEP + accepted
end

local function has_other_scores(models)
  for _, model in ipairs(models) do
    if policy_of(model.name).lane_score then return true end
  end
  return false
end

local function is_lane_before(a, b) return a.key < b.key or (a.key == b.key and a.name < b.name) end

-- Return the models of these groups whose jobs may be offered now, in the order of their turn, each with the first lane
-- of its groups.
local function next_of_models(groups, now)
  local models, by_name = {}, {}
  for _, group in ipairs(groups) do
    local model = model_of(group)
    local rules, stats = rules_of(model), stats_key("model", model)
    if by_name[model] == nil then
      local may_start = not is_stopped(rules.state) and breaker_allows(stats, now)
      by_name[model] = may_start and { name = model, rules = rules, stats = stats, lanes = {} } or false
    end
    local lane = by_name[model] and first_lane(group)
    if lane then
      if #by_name[model].lanes == 0 then models[#models + 1] = by_name[model] end
      table.insert(by_name[model].lanes, lane)
    end
  end
  local by_time = #models > 1 and has_other_scores(models)
  for _, model in ipairs(models) do
    if #model.lanes > 1 then table.sort(model.lanes, is_lane_before) end
    model.turn = #models > 1 and turn_of(model.lanes[1], model, by_time, now)
  end
  if #models > 1 then table.sort(models, function(a, b) return a.turn < b.turn end) end
  return models, by_name
end

-- Return whether a job of this model waits that may be offered, and that the server may run.
local function has_work(server, model)
  if not model or not serves(server.entry, model.name) then return false end
  for _, lane in ipairs(model.lanes) do
    if meets_constraints(lane.constraints, server.entry, model.name) then return true end
  end
  return false
end

-- Return whether the server continues with the model that it has loaded, although a job of another model comes first.
-- It passes over jobs of a model for at most `affinity` ms, counted from the first time.
local function prefers_loaded_model(server, model, by_name, now)
  if model.rules.affinity == 0 then return false end
  local stats, passing, fields = server.stats, "passing:" .. model.name, load_hash(server.stats)
  if not fields.loaded or fields.loaded == model.name or not has_work(server, by_name[fields.loaded]) then
    return false
  end
  if not fields[passing] then set_field(stats, passing, now) end
  return now - tonumber(fields[passing]) < model.rules.affinity
end

-- Return the best server for a lane's job, of up to 16 eligible ones that have been free longest; and whether one was
-- left out because the job would be a repeated probe.
-- `again`: repeated probes are allowed.
local function best_server(servers, model, lane, by_name, now, again)
  local best, lowest, seen, left_out = nil, nil, 0, false
  local n, server = 1, nth_server(servers, 1)
  while server and seen < 16 do
    local entry = server.entry
    local fits = server.slots[server.next] and serves(entry, model.name)
      and meets_constraints(lane.constraints, entry, model.name)
    local is_well = fits and breaker_allows(server.stats, now)
    if is_well and not again and is_repeated_probe(server.stats, lane.job, now) then is_well, left_out = false, true end
    if is_well and not prefers_loaded_model(server, model, by_name, now) then
      if not best then
        best = server
      else
        lowest = lowest or server_score(best.name, best.entry, model.name, now).total
        local score = server_score(server.name, entry, model.name, now).total
        if score < lowest then best, lowest = server, score end
      end
      if not load_hash(server.stats).silent_since then seen = seen + 1 end -- another may answer
    end
    n = n + 1
    server = nth_server(servers, n)
  end
  return best, left_out
end

-- The server gets a job of `model`.  Other models that have work for it continue to be passed over.  Returns whether
-- its last job was of another model, or is unknown.
local function record_loaded_model(server, model, by_name)
  local stats, loaded = server.stats, load_hash(server.stats).loaded
  if loaded ~= model then
    set_field(stats, "loaded", model)
    if loaded then increment_field(stats, "swaps", 1) end
  end
  if not serves_several(server.entry) then return loaded ~= model end
  for other in models_in(server.entry) do
    if other == model or not has_work(server, by_name[other]) then set_field(stats, "passing:" .. other, false) end
  end
  return loaded ~= model
end

-- Take the job at the head of a lane and the server's first free slot, and write the lease.  `owner` "": it is open for
-- the worker that claims it before it expires.  Returns nil if the job holds a lease already: it came in twice, after
-- the database had lost its first row.  This entry of it is removed, and the next call makes the next offer (LEASE-1).
local function make_offer(head, servers, server, by_name, prefix, owner, now, lease_ms)
  local lane, job = parse_lane(head.name), head.job
  load_rules(lane)
  local is_new = redis.call("ZADD", LEASES, "NX", now + lease_ms, job) == 1
  if not is_new then remove_from_lane(lane, head.member, head.following) return end
  local slot, number = take_slot(servers, server), increment_field(META, "offers", 1)
  local lease, stats = lease_name(prefix .. "-" .. number), stats_key("model", lane.model)
  local policy = policy_of(lane.model)
  local charged = policy.charge_offer and policy.charge_offer(lane, number) or 0
  remove_from_lane(lane, head.member, head.following)
  write_lease(job, lease, owner, slot, lane, head.constraints, head.seq, head.created, number, charged, now)
  local changes_model = record_loaded_model(server, lane.model, by_name)
  if changes_model then redis.call("HSET", lease_key(job), "swap", "1") end
  set_probe(stats, job)
  set_probe(server.stats, job)
  return { job, lease, slot, server.name, lane.model, number, owner, changes_model and 1 or 0 }
end

local function with_job(lane, member, seq)
  local job, created = parse_lane_member(member)
  return { name = lane.name, constraints = lane.constraints, member = member, seq = seq, job = job, created = created }
end

-- Return a lane with the job at its head, and with what will be its head after that.
local function with_head(lane)
  local head = redis.call("ZRANGE", lane_key(lane.name), 0, 1, "WITHSCORES")
  local found = with_job(lane, head[1], head[2])
  found.following = { head[3], head[4] }
  return found
end

-- Return jobs of a group that may probe in place of its first one, in order, from some of its first classes and lanes.
local function other_probe_jobs(group)
  local classes, found = { group }, {}
  if not has_no_constraints(group) then
    classes = redis.call("ZRANGEBYSCORE", group_key(group), "-inf", "(inf", "LIMIT", 0, LOOKED_AT)
    for i, ranked in ipairs(classes) do classes[i] = string.sub(ranked, 3) end
  end
  for _, class in ipairs(classes) do
    local _, constraints = group_of(class)
    for _, name in ipairs(redis.call("ZRANGEBYSCORE", class_key(class), "-inf", "(inf", "LIMIT", 0, LOOKED_AT)) do
      local jobs = redis.call("ZRANGE", lane_key(name), 0, LOOKED_AT - 1, "WITHSCORES")
      local lane = { name = name, constraints = constraints }
      for i = 1, #jobs, 2 do found[#found + 1] = with_job(lane, jobs[i], jobs[i + 1]) end
    end
  end
  return found
end

-- Return a server for a lane's job; and whether none was found because the job would be a repeated probe.
local function server_for(servers, model, lane, by_name, now, again)
  if not again and is_repeated_probe(model.stats, lane.job, now) then return nil, true end
  return best_server(servers, model, lane, by_name, now, again)
end

-- Return the next job and its server, in the order of turns; and whether a repeated probe was passed over.
local function next_pair(servers, models, by_name, now, again)
  local passed_over = false
  for _, model in ipairs(models) do
    for _, first in ipairs(model.lanes) do
      local lane = with_head(first)
      local server, left_out = server_for(servers, model, lane, by_name, now, again)
      if server then return lane, server end
      for _, other in ipairs(left_out and other_probe_jobs(first.group) or {}) do
        server = server_for(servers, model, other, by_name, now, false)
        if server then return other, server end
      end
      passed_over = passed_over or left_out
    end
  end
  return nil, nil, passed_over
end

-- Make the next offer; nil: no waiting job fits a free slot.  A job whose last run failed there probes a breaker only
-- if no other waiting job can: otherwise a bad batch would hold a breaker open for the good jobs behind it.
local function make_next_offer(groups, servers, prefix, owner, now, lease_ms)
  local models, by_name = next_of_models(groups, now)
  local lane, server, passed_over = next_pair(servers, models, by_name, now, false)
  if passed_over then lane, server = next_pair(servers, models, by_name, now, true) end
  if server then return make_offer(lane, servers, server, by_name, prefix, owner, now, lease_ms) end
end

-- Make up to `limit` offers, whose leases have names that begin with the random `prefix`.  The first is a lease of
-- `claimant` ("": there is none) for `lease_ms`; the others are open for `offer_ms`.  At most `capacity` offers are
-- open at once, as many as workers accept runs: more would wait unseen.
local function make_offers(offering, now)
  local offers, limit, prefix, open_left = {}, offering.limit, offering.prefix, nil
  end_cooldowns(now)
  local groups = limit > 0 and is_open(now) and redis.call("HKEYS", GROUPS) or {}
  if #groups == 0 then return offers end
  local servers = free_servers()
  if not has_free_slot(servers) then return offers end
  while #offers < limit and #groups > 0 do
    local made
    if #offers == 0 and offering.claimant ~= "" then
      made = make_next_offer(groups, servers, prefix, offering.claimant, now, offering.lease_ms)
    else
      open_left = (open_left or offering.capacity - redis.call("ZCARD", open_offers_key())) - 1
      made = open_left >= 0 and make_next_offer(groups, servers, prefix, "", now, offering.offer_ms)
    end
    if not made then break end
    offers[#offers + 1] = made
    groups = #offers < limit and has_free_slot(servers) and redis.call("HKEYS", GROUPS) or {}
  end
  return offers
end
