"""Where rows come from: files, the hub, mteb, samples; and how they become records."""
