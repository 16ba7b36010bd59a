-- offer: the job whose turn it is and a slot that may run it, taken together or not at all (SLOT-2, LEASE-1).

-- server -> how many of its free slots are not offered, since it has as many leases that have no slot (SLOT-1).
local function withheld_slots()
  if not field(META, "excess") then return {} end
  local found, withheld = redis.call("HGETALL", excess_key()), {}
  for i = 1, #found, 2 do withheld[found[i]] = tonumber(found[i + 1]) end
  return withheld
end

local LOOKED_AT = 16 -- classes, lanes of each, and jobs of each lane, of which one may probe
local READ_AT_ONCE = 64 -- free slots
local CHOICES = 16 -- eligible servers that are compared, those that are free longest

-- The servers with free slots, that which has been free longest first, each {name, entry, stats, slots in that order,
-- next}; read as far as somebody asks: by nth_server.  A server stands here again when all its slots were taken before
-- more of them were read.
local function free_servers()
  return { by_name = {}, withheld = withheld_slots(), read = 0, left = 0, whole = false }
end

-- Whether there were more free slots.
local function read_more(servers)
  if servers.whole then return false end
  local slots = redis.call("ZRANGE", FREE, servers.read, servers.read + READ_AT_ONCE - 1)
  local by_name, withheld = servers.by_name, servers.withheld
  servers.read, servers.whole = servers.read + #slots, #slots < READ_AT_ONCE
  for _, slot in ipairs(slots) do
    local name = server_of(slot)
    if by_name[name] == nil then
      local entry, stats = online_server(name), stats_key("server", name)
      by_name[name] = entry and { name = name, entry = entry, stats = stats, slots = {}, next = 1 } or false
    end
    local server = by_name[name]
    if (withheld[name] or 0) > 0 then
      withheld[name] = withheld[name] - 1
    elseif server then
      if not server.slots[server.next] then servers[#servers + 1] = server end
      server.slots[#server.slots + 1] = slot
      servers.left = servers.left + 1
    end
  end
  return #slots > 0
end

-- nil: there are not so many.
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

local function is_any_left(servers)
  while servers.left == 0 and read_more(servers) do end
  return servers.left > 0
end

-- Where the job at the head of a model's first lane stands among those of other models: by priority, then acceptance.
local function turn_of(lane, model, now)
  local own, policy = read_lane(lane.name).priority, policy_of(model.name)
  local priority = policy.priority_among_models(own, lane.key, model.rules, now)
  return priority * PRIORITY_STEP + tonumber(redis.call("ZRANGE", lane_key(lane.name), 0, 0, "WITHSCORES")[2])
end

local function is_lane_before(a, b) return a.key < b.key or (a.key == b.key and a.name < b.name) end

-- The models of these groups whose jobs may be offered now, in the order of their turn, each with the first lane of its
-- groups.
local function next_of_models(groups, now)
  local models, by_name = {}, {}
  for _, group in ipairs(groups) do
    local model = model_of(group)
    local rules, stats = rules_of(model), stats_key("model", model)
    if by_name[model] == nil then
      local runs = rules.state ~= "paused" and rules.state ~= "frozen" and lets_through(stats, now)
      by_name[model] = runs and { name = model, rules = rules, stats = stats, lanes = {} } or false
    end
    local lane = by_name[model] and first_lane(group)
    if lane then
      if #by_name[model].lanes == 0 then models[#models + 1] = by_name[model] end
      table.insert(by_name[model].lanes, lane)
    end
  end
  for _, model in ipairs(models) do
    if #model.lanes > 1 then table.sort(model.lanes, is_lane_before) end
    model.turn = #models > 1 and turn_of(model.lanes[1], model, now)
  end
  if #models > 1 then table.sort(models, function(a, b) return a.turn < b.turn end) end
  return models, by_name
end

-- Whether a job of this model waits that may be offered, and that the server may run.
local function has_work(server, model)
  if not model or not serves(server.entry, model.name) then return false end
  for _, lane in ipairs(model.lanes) do
    if matches(lane.constraints, server.entry, model.name) then return true end
  end
  return false
end

-- Whether the server goes on with the model that it has loaded, although a job of another comes first.  Of each model
-- it passes jobs over for `affinity` ms at most, counted from the first time.
local function stays_with_loaded(server, model, by_name, now)
  if model.rules.affinity == 0 then return false end
  local stats, passing, has = server.stats, "passing:" .. model.name, read_hash(server.stats)
  if not has.loaded or has.loaded == model.name or not has_work(server, by_name[has.loaded]) then return false end
  if not has[passing] then set_field(stats, passing, now) end
  return now - tonumber(has[passing]) < model.rules.affinity
end

-- The best server for a lane's job; and whether one was left out because the job failed there when it last ran, and
-- would be the probe of its breaker.  `again`: none is.
local function best_server(servers, model, lane, by_name, now, again)
  local best, lowest, seen, left_out = nil, nil, 0, false
  local n, server = 1, nth_server(servers, 1)
  while server and seen < CHOICES do
    local entry = server.entry
    local fits = server.slots[server.next] and serves(entry, model.name)
      and matches(lane.constraints, entry, model.name)
    local well = fits and lets_through(server.stats, now)
    if well and not again and would_probe_again(server.stats, lane.job, now) then well, left_out = false, true end
    if well and not stays_with_loaded(server, model, by_name, now) then
      if not best then
        best = server
      else
        lowest = lowest or score_of(best.name, best.entry, model.name, now).total
        local its = score_of(server.name, entry, model.name, now).total
        if its < lowest then best, lowest = server, its end
      end
      seen = seen + 1
    end
    n = n + 1
    server = nth_server(servers, n)
  end
  return best, left_out
end

-- The server takes a job of `model`.  Other models that have work for it go on being passed over.  Answers whether its
-- last job was not of this model, or is not known.
local function note_loaded(server, model, by_name)
  local stats, loaded = server.stats, read_hash(server.stats).loaded
  if loaded ~= model then
    set_field(stats, "loaded", model)
    if loaded then add_to_field(stats, "swaps", 1) end
  end
  if not serves_several(server.entry) then return loaded ~= model end
  for other in models_in(server.entry) do
    if other == model or not has_work(server, by_name[other]) then set_field(stats, "passing:" .. other, false) end
  end
  return loaded ~= model
end

-- Take the job at the head of a lane and the server's first free slot, and write the lease.  `owner` "" leaves it open
-- for whoever claims it before it expires.  nil: the job holds a lease, having come in twice, for the record lost its
-- first row; this place of it is dropped, and the next offer is made when somebody looks again (LEASE-1).
local function take(head, servers, server, by_name, prefix, owner, now, lease_ms)
  local lane, job = read_lane(head.name), head.job
  read_rules(lane)
  local is_new = redis.call("ZADD", LEASES, "NX", now + lease_ms, job) == 1
  if not is_new then take_from_lane(lane, head.member, head.following) return end
  local slot, number = take_slot(servers, server), add_to_field(META, "offers", 1)
  local lease, stats = prefix .. "-" .. number, stats_key("model", lane.model)
  local policy = policy_of(lane.model)
  local charged = policy.charge_offer and policy.charge_offer(lane, number) or 0
  take_from_lane(lane, head.member, head.following)
  write_lease(job, lease, owner, slot, lane, head.constraints, head.seq, head.created, number, charged, now)
  if note_loaded(server, lane.model, by_name) then redis.call("HSET", lease_key(job), "swap", "1") end
  note_probe(stats, job)
  note_probe(server.stats, job)
  return { job, lease, slot, server.name, lane.model, number, owner }
end

local function with_job(lane, member, seq)
  local job, created = read_member(member)
  return { name = lane.name, constraints = lane.constraints, member = member, seq = seq, job = job, created = created }
end

-- With the job at the head of its lane, and what will be its head without that.
local function with_head(lane)
  local head = redis.call("ZRANGE", lane_key(lane.name), 0, 1, "WITHSCORES")
  local found = with_job(lane, head[1], head[2])
  found.following = { head[3], head[4] }
  return found
end

-- Jobs of a group that may probe in the place of its first one, in order, some of its first classes and lanes.
local function others_of(group)
  local classes, found = { group }, {}
  if not asks_nothing(group) then
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

-- A server for a lane's job, unless it would be the probe of a breaker that it was to blame for; and whether it is so.
local function server_for(servers, model, lane, by_name, now, again)
  if not again and would_probe_again(model.stats, lane.job, now) then return nil, true end
  return best_server(servers, model, lane, by_name, now, again)
end

-- The next job and its server, in the order of turns; and whether some were passed over that would probe again.
local function next_pair(servers, models, by_name, now, again)
  local passed_over = false
  for _, model in ipairs(models) do
    for _, first in ipairs(model.lanes) do
      local lane = with_head(first)
      local server, left_out = server_for(servers, model, lane, by_name, now, again)
      if server then return lane, server end
      for _, other in ipairs(left_out and others_of(first.group) or {}) do
        server = server_for(servers, model, other, by_name, now, false)
        if server then return other, server end
      end
      passed_over = passed_over or left_out
    end
  end
  return nil, nil, passed_over
end

-- The next offer; nil: no waiting job fits a free slot.  A breaker is probed with a job that failed there last only if
-- no other waits that could.
local function take_next(groups, servers, prefix, owner, now, lease_ms)
  local models, by_name = next_of_models(groups, now)
  local lane, server, passed_over = next_pair(servers, models, by_name, now, false)
  if passed_over then lane, server = next_pair(servers, models, by_name, now, true) end
  if server then return take(lane, servers, server, by_name, prefix, owner, now, lease_ms) end
end

-- Up to `limit` offers, whose leases get names that begin with `prefix`, which is random.  The first goes straight to
-- `claimant`, "" if there is none, for `lease_ms`; the others are open for `offer_ms`, and no more than `room` are open
-- at once, for as many runs have workers room: lest they wait where nobody looks.
local function make_offers(offering, now)
  local offers, limit, prefix, open_left = {}, offering.limit, offering.prefix, nil
  end_cooldowns(now)
  local groups = limit > 0 and is_open(now) and redis.call("HKEYS", GROUPS) or {}
  if #groups == 0 then return offers end
  local servers = free_servers()
  if not is_any_left(servers) then return offers end
  while #offers < limit and #groups > 0 do
    local first, made = #offers == 0 and offering.claimant ~= ""
    if first then
      made = take_next(groups, servers, prefix, offering.claimant, now, offering.lease_ms)
    else
      open_left = (open_left or offering.room - redis.call("ZCARD", open_key())) - 1
      made = open_left >= 0 and take_next(groups, servers, prefix, "", now, offering.offer_ms)
    end
    if not made then break end
    offers[#offers + 1] = made
    groups = #offers < limit and is_any_left(servers) and redis.call("HKEYS", GROUPS) or {}
  end
  return offers
end
