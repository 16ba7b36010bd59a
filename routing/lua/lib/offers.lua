-- offers: take the next job and a slot that may run it, together or neither (SLOT-2, LEASE-1).
-- @include lib/epoch
-- @include lib/groups
-- @include lib/leases
-- @include lib/server_stats

local make_offers = nil -- luacheck: ignore 311 (set below; without a value it would last one call)

do -- Lua allows a script 200 local names, and no other file needs those of this one.
  local MANY_GROUPS, KINDS_AT_ONCE = 16, 2

  local free_slots, sources_for, next_server, take_slot

  do -- free slots
    -- Return server -> number of its leases whose slot was removed or is held by another lease.  So many of its free
    -- slots are not offered (SLOT-1).
    local function excess_by_server()
      if not get_field(META, "excess") then return {} end
      local found, excess = redis.call("HGETALL", excess_key()), {}
      for i = 1, #found, 2 do excess[found[i]] = tonumber(found[i + 1]) end
      return excess
    end

    -- The free slots as one call reads them, from the indexes in `sources`: one of each kind of server, or, where
    -- models have very many kinds, that of all slots.
    function free_slots()
      return { sources = {}, excess = excess_by_server(), count = redis.call("ZCARD", FREE) }
    end

    -- A source lists the servers with free slots, the longest free first, each {name, entry, stats, slots in that
    -- order, next, source}; `since` and `first` have the slot that gives the n-th its place.  It is read as far as
    -- nth_server needs.  A server is listed again if all its slots were taken before more were read.
    local function source_of(free, key)
      local source = free.sources[key] or { key = key, by_name = {}, since = {}, first = {}, read = 0, whole = false }
      free.sources[key] = source
      return source
    end

    -- Return whether there were more free slots.
    local function read_more(free, source)
      if source.whole then return false end
      local read_at_once = 32
      local slots = redis.call("ZRANGE", source.key, source.read, source.read + read_at_once - 1, "WITHSCORES")
      local by_name, excess, count = source.by_name, free.excess, #slots / 2
      source.read, source.whole = source.read + count, count < read_at_once
      for i = 1, #slots, 2 do
        local slot = slots[i]
        local name = server_of(slot)
        if by_name[name] == nil then
          local entry, stats = online_server(name), stats_key("server", name)
          by_name[name] = entry and { name = name, entry = entry, stats = stats, slots = {}, next = 1, source = source }
            or false
        end
        local server = by_name[name]
        if (excess[name] or 0) > 0 then
          excess[name] = excess[name] - 1
        elseif server then
          if not server.slots[server.next] then
            local n = #source + 1
            source[n], source.since[n], source.first[n] = server, tonumber(slots[i + 1]), slot
          end
          server.slots[#server.slots + 1] = slot
        end
      end
      return count > 0
    end

    -- Return nil if there are fewer.
    local function nth_server(free, source, n)
      while not source[n] and read_more(free, source) do end
      return source[n]
    end

    -- Return the indexes of the free slots that may run a job of this lane.
    function sources_for(free, lane, model)
      if has_many_kinds() then return { source_of(free, FREE) } end
      local sources = {}
      for i, kind in ipairs(kinds_that_run(model.name, lane.constraints)) do
        sources[i] = source_of(free, free_key(kind))
      end
      return sources
    end

    -- Return the next server of several sources, the longest free first; nil: there is none.  `places`: of each source,
    -- how many of its servers were returned.
    function next_server(free, sources, places)
      local best, since, first
      for i, source in ipairs(sources) do
        local n = (places[i] or 0) + 1
        if nth_server(free, source, n) then
          local at = source.since[n]
          if not best or at < since or (at == since and source.first[n] < first) then
            best, since, first = i, at, source.first[n]
          end
        end
      end
      if not best then return nil end
      places[best] = (places[best] or 0) + 1
      return sources[best][places[best]]
    end

    function take_slot(free, server)
      local slot = server.slots[server.next]
      server.next = server.next + 1
      remove_free_slot(slot)
      server.source.read, free.count = server.source.read - 1, free.count - 1
      return slot
    end
  end

  local next_of_models, waiting_model

  do -- whose turn it is
    -- Return the rank of a model's next job among those of other models: by priority, then by acceptance.  `by_time`:
    -- by the time of acceptance, as scores of another meaning cannot be compared.
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

    -- Models with waiting jobs that may be offered now: by name, false for others.
    local function read_group(by_name, group, now)
      local name = model_of(group)
      if by_name[name] == nil then
        local rules, stats = rules_of(name), stats_key("model", name)
        local may_start = not is_stopped(rules.state) and breaker_allows(stats, now)
        by_name[name] = may_start and { name = name, rules = rules, stats = stats, lanes = {} } or false
      end
      local lane = by_name[name] and first_lane(group)
      if lane then table.insert(by_name[name].lanes, lane) end
      return by_name[name]
    end

    -- Return the models of these groups whose jobs may be offered now, in the order of their turn, each with the first
    -- lane of its groups; and the same by name.
    function next_of_models(groups, now)
      local models, by_name = {}, {}
      for _, group in ipairs(groups) do
        local model = read_group(by_name, group, now)
        if model and #model.lanes == 1 and not model.is_listed then
          models[#models + 1], model.is_listed = model, true
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

    -- Return a model with waiting jobs, also if only some groups were read.
    function waiting_model(by_name, name, now)
      if by_name[name] == nil then
        for _, group in ipairs(redis.call("SMEMBERS", model_groups_key(name))) do read_group(by_name, group, now) end
        by_name[name] = by_name[name] or false
      end
      return by_name[name]
    end
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
    if not fields.loaded or fields.loaded == model.name then return false end
    if not has_work(server, waiting_model(by_name, fields.loaded, now)) then return false end
    if not fields[passing] then set_field(stats, passing, now) end
    return now - tonumber(fields[passing]) < model.rules.affinity
  end

  -- Return the best server for a lane's job, of up to 16 eligible ones that have been free longest; and whether one was
  -- left out because the job would be a repeated probe.
  -- `again`: repeated probes are allowed.
  local function best_server(free, model, lane, by_name, now, again)
    local best, lowest, seen, left_out = nil, nil, 0, false
    local sources, places = sources_for(free, lane, model), {}
    local server = next_server(free, sources, places)
    while server and seen < 16 do
      local entry = server.entry
      local fits = server.slots[server.next] and serves(entry, model.name)
        and meets_constraints(lane.constraints, entry, model.name)
      local is_well = fits and breaker_allows(server.stats, now)
      if is_well and not again and is_repeated_probe(server.stats, lane.job, now) then
        is_well, left_out = false, true
      end
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
      server = next_server(free, sources, places)
    end
    return best, left_out
  end

  -- The server gets a job of `model`.  Other models that have work for it continue to be passed over.  Returns whether
  -- its last job was of another model, or is unknown.
  local function record_loaded_model(server, model, by_name, now)
    local stats, loaded = server.stats, load_hash(server.stats).loaded
    if loaded ~= model then
      set_field(stats, "loaded", model)
      if loaded then increment_field(stats, "swaps", 1) end
    end
    if not serves_several(server.entry) then return loaded ~= model end
    for other in models_in(server.entry) do
      if other == model or not has_work(server, waiting_model(by_name, other, now)) then
        set_field(stats, "passing:" .. other, false)
      end
    end
    return loaded ~= model
  end

  -- Take the job at the head of a lane and the server's first free slot, and write the lease.  `owner` "": it is open
  -- for the worker that claims it before it expires.  Returns nil if the job holds a lease already: it came in twice,
  -- after the database had lost its first row.  This entry of it is removed, and the next call makes the next offer
  -- (LEASE-1).
  local function make_offer(head, free, server, by_name, prefix, owner, now, lease_ms)
    local lane, job = parse_lane(head.name), head.job
    load_rules(lane)
    local is_new = redis.call("ZADD", LEASES, "NX", now + lease_ms, job) == 1
    if not is_new then remove_from_lane(lane, head.member, head.following) return end
    local slot, number = take_slot(free, server), increment_field(META, "offers", 1)
    local lease, stats = lease_name(prefix .. "-" .. number), stats_key("model", lane.model)
    local policy = policy_of(lane.model)
    local charged = policy.charge_offer and policy.charge_offer(lane, number) or 0
    remove_from_lane(lane, head.member, head.following)
    write_lease(job, lease, owner, slot, lane, head.constraints, head.seq, head.created, number, charged, now)
    local changes_model = record_loaded_model(server, lane.model, by_name, now)
    if changes_model then redis.call("HSET", lease_key(job), "swap", "1") end
    set_probe(stats, job)
    set_probe(server.stats, job)
    return { job, lease, slot, server.name, lane.model, number, owner, changes_model and 1 or 0 }
  end

  local next_pair

  do -- the next job and its server
    local LOOKED_AT = 16 -- classes, lanes of each, and jobs of each lane: candidates for a probe

    local function with_job(lane, member, seq)
      local job, created = parse_lane_member(member)
      return { name = lane.name, constraints = lane.constraints, member = member, seq = seq, job = job,
        created = created }
    end

    -- Return a lane with the job at its head, and with what will be its head after that.
    local function with_head(lane)
      local head = redis.call("ZRANGE", lane_key(lane.name), 0, 1, "WITHSCORES")
      local found = with_job(lane, head[1], head[2])
      found.following = { head[3], head[4] }
      return found
    end

    -- Return jobs of a group that may probe in place of its first one, in order, from some of its first classes and
    -- lanes.
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
    local function server_for(free, model, lane, by_name, now, again)
      if not again and is_repeated_probe(model.stats, lane.job, now) then return nil, true end
      return best_server(free, model, lane, by_name, now, again)
    end

    -- Return the next job and its server, in the order of turns; and whether a repeated probe was passed over.
    function next_pair(free, models, by_name, now, again)
      local passed_over = false
      for _, model in ipairs(models) do
        for _, first in ipairs(model.lanes) do
          local lane = with_head(first)
          local server, left_out = server_for(free, model, lane, by_name, now, again)
          if server then return lane, server end
          for _, other in ipairs(left_out and other_probe_jobs(first.group) or {}) do
            server = server_for(free, model, other, by_name, now, false)
            if server then return other, server end
          end
          passed_over = passed_over or left_out
        end
      end
      return nil, nil, passed_over
    end
  end

  -- Make the next offer of these groups; nil: no waiting job fits a free slot.  A job whose last run failed there
  -- probes a breaker only if no other waiting job can: otherwise a bad batch would hold a breaker open for the good
  -- jobs behind it.  `is_whole`: no other groups wait.
  local function offer_of_groups(groups, is_whole, free, prefix, owner, now, lease_ms)
    local models, by_name = next_of_models(groups, now)
    if is_whole then setmetatable(by_name, { __index = function() return false end }) end
    local lane, server, passed_over = next_pair(free, models, by_name, now, false)
    if passed_over then lane, server = next_pair(free, models, by_name, now, true) end
    if server then return make_offer(lane, free, server, by_name, prefix, owner, now, lease_ms) end
  end

  -- Return the groups of the next kinds of servers with free slots and waiting jobs; nil: all were looked at.  Each
  -- kind with both is in the index `ready`, the one that was looked at longest ago first; others leave it here.  `pass`
  -- has what one call has looked at.
  local function next_ready_groups(pass)
    local groups, looked_at = {}, 0
    while looked_at < KINDS_AT_ONCE do
      if not pass.kinds or pass.kinds[pass.next] == nil then
        if pass.is_whole then break end
        pass.is_whole = pass.kinds ~= nil
        pass.kinds, pass.next = redis.call("ZRANGE", ready_key(), 0, pass.is_whole and -1 or KINDS_AT_ONCE - 1), 1
        if #pass.kinds == 0 then break end
      end
      local kind, found = pass.kinds[pass.next], 0
      pass.next = pass.next + 1
      if not pass.seen[kind] then
        pass.seen[kind], looked_at = true, looked_at + 1
        if redis.call("EXISTS", free_key(kind)) == 1 then
          for model in models_in(get_field(KINDS, kind) or "") do
            for _, group in ipairs(redis.call("SMEMBERS", model_groups_key(model))) do
              found = found + 1
              if not pass.seen_groups[group] then groups[#groups + 1], pass.seen_groups[group] = group, true end
            end
          end
        end
        if found > 0 then
          redis.call("ZADD", ready_key(), get_number(META, "offers") + 1, kind)
        else
          redis.call("ZREM", ready_key(), kind)
        end
      end
    end
    return looked_at > 0 and groups or nil
  end

  -- Make the next offer; nil: no waiting job fits a free slot.  If very many groups wait, those are looked at whose
  -- servers have free slots, some kinds of servers at a time: the order of jobs holds among models that compete for the
  -- same servers, and among the kinds of one look.
  local function make_next_offer(free, prefix, owner, now, lease_ms)
    if has_many_kinds() or redis.call("HLEN", GROUPS) <= MANY_GROUPS then
      return offer_of_groups(redis.call("HKEYS", GROUPS), true, free, prefix, owner, now, lease_ms)
    end
    local pass, made = { seen = {}, seen_groups = {} }, nil
    local groups = next_ready_groups(pass)
    while groups and not made do
      made = #groups > 0 and offer_of_groups(groups, false, free, prefix, owner, now, lease_ms) or nil
      groups = not made and next_ready_groups(pass)
    end
    return made
  end

  -- Make up to `limit` offers, whose leases have names that begin with the random `prefix`.  The first is a lease of
  -- `claimant` ("": there is none) for `lease_ms`; the others are open for `offer_ms`.  At most `capacity` offers are
  -- open at once, as many as workers accept runs: more would wait unseen.
  function make_offers(offering, now)
    local offers, limit, prefix, open_left = {}, offering.limit, offering.prefix, nil
    end_cooldowns(now)
    if limit == 0 or not is_open(now) or redis.call("HLEN", GROUPS) == 0 then return offers end
    local free = free_slots()
    while #offers < limit and free.count > 0 do
      local made
      if #offers == 0 and offering.claimant ~= "" then
        made = make_next_offer(free, prefix, offering.claimant, now, offering.lease_ms)
      else
        open_left = (open_left or offering.capacity - redis.call("ZCARD", open_offers_key())) - 1
        made = open_left >= 0 and make_next_offer(free, prefix, "", now, offering.offer_ms)
      end
      if not made then break end
      offers[#offers + 1] = made
    end
    return offers
  end
end
