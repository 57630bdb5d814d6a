// The address map: one picture of all blocks, in the screen's own pixels, and what lies under the pointer.
//
// The blocks lie end to end and are wrapped into rows, so that each block's place is the sum of the sizes before it. A
// pixel takes the mean of what it covers: a block narrower than one pixel tints it.
weir.map = (() => {
  const [IN_FLIGHT, IDLE] = [1, 2];
  const GAP = 0.08;  // of a row, above and below its blocks
  const BORDER = 4;  // pixels: blocks and segments at least as wide are told apart by a line

  let models = null, start = null, base = null, names = null, soon = false, read = null;

  // Where each piece begins, in bytes from the first, and where the last one ends.
  function sums(sizes) {
    const found = new Float64Array(sizes.length + 1);
    for (let at = 0; at < sizes.length; at++) found[at + 1] = found[at] + sizes[at];
    return found;
  }

  // The piece that holds a byte: the last that begins at or before it.
  function holder(starts, byte) {
    let low = 0, high = starts.length - 1;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= byte) low = middle; else high = middle;
    }
    return low;
  }

  const rgb = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));

  // Which colour of a palette a block has: idle, then live by stream, then in flight by stream.
  function shade(state, stream, hues) {
    return state === IDLE ? 0 : 1 + (((stream % hues) + hues) % hues) + (state === IN_FLIGHT ? hues : 0);
  }

  // One row of pixels.  from, to: the bytes that they stand for; begin: the byte at which pixel 0 begins.
  function scan(line, sum, blocks, starts, palette, from, to, begin, scale) {
    const hues = (palette.length - 1) / 2;
    sum.fill(0);
    const add = (at, part, color) => {
      sum[4 * at] += part * color[0];
      sum[4 * at + 1] += part * color[1];
      sum[4 * at + 2] += part * color[2];
      sum[4 * at + 3] += part;
    };
    for (let at = holder(starts, from); at < blocks.size.length && starts[at] < to; at++) {
      const left = (Math.max(starts[at], from) - begin) * scale;
      let right = (Math.min(starts[at + 1], to) - begin) * scale;
      if (starts[at + 1] <= to && right - left >= BORDER) right -= 0.5;
      const color = palette[shade(blocks.state[at], blocks.stream[at], hues)];
      const [first, last] = [Math.floor(left), Math.min(Math.floor(right), line.length - 1)];
      if (first === last) {
        add(first, right - left, color);
      } else {
        add(first, first + 1 - left, color);
        for (let pixel = first + 1; pixel < last; pixel++) add(pixel, 1, color);
        add(last, Math.min(1, right - last), color);
      }
    }
    for (let at = 0; at < line.length; at++) {
      const part = sum[4 * at + 3];
      line[at] = part > 0
        ? ((Math.min(255, Math.round(255 * part)) << 24) | (Math.round(sum[4 * at + 2] / part) << 16)
          | (Math.round(sum[4 * at + 1] / part) << 8) | Math.round(sum[4 * at] / part)) >>> 0
        : 0;
    }
  }

  // Paint into `pixels`, `width` by `height`: bytes x0 to x1 of the rows y0 to y1.  edge: the colour of the lines
  // around segments.  starts, bases: the sums of the sizes of blocks and segments.
  function paint(pixels, width, height, {x0, x1, y0, y1, row}, blocks, starts, bases, palette, edge) {
    pixels.fill(0);
    const total = starts[starts.length - 1];
    const [scale, high] = [width / (x1 - x0), height / (y1 - y0)];
    const [line, sum] = [new Uint32Array(width), new Float32Array(4 * width)];
    const ink = ((255 << 24) | (edge[2] << 16) | (edge[1] << 8) | edge[0]) >>> 0;
    for (let at = Math.max(0, Math.floor(y0)); at < y1 && at * row < total; at++) {
      const begin = at * row + x0;
      const [from, to] = [at * row + Math.max(0, x0), Math.min(total, at * row + Math.min(row, x1))];
      if (from >= to) continue;
      scan(line, sum, blocks, starts, palette, from, to, begin, scale);
      const pixel = (y) => Math.min(height, Math.max(0, Math.round((y - y0) * high)));
      const [above, below] = [pixel(at), pixel(at + 1)];
      for (let y = pixel(at + GAP); y < pixel(at + 1 - GAP); y++) pixels.set(line, y * width);
      const [left, right] = [(from - begin) * scale, (to - begin) * scale].map(Math.floor);
      pixels.fill(ink, Math.min(above, height - 1) * width + left, Math.min(above, height - 1) * width + right);
      pixels.fill(ink, Math.min(below, height - 1) * width + left, Math.min(below, height - 1) * width + right);
      for (let one = holder(bases, from); one < bases.length - 1 && bases[one] < to; one++) {
        if ((bases[one + 1] - bases[one]) * scale < BORDER) continue;
        for (const byte of [bases[one], bases[one + 1]]) {
          if (byte < from || byte > to) continue;
          const x = Math.min(width - 1, Math.floor((byte - begin) * scale));
          for (let y = above; y < below; y++) pixels[y * width + x] = ink;
        }
      }
    }
  }

  function draw() {
    soon = false;
    const {plot, blocks, segments, picture, looks} = models;
    if (read?.blocks !== blocks.data || read.segments !== segments.data || read.names !== models.names.data) {
      read = {blocks: blocks.data, segments: segments.data, names: models.names.data};
      [start, base] = [sums(blocks.data.size), sums(segments.data.size)];
      names = new Map(Array.from(models.names.data.number, (number, at) => [number, models.names.data.name[at]]));
    }
    if (!plot.inner_width || !plot.inner_height) return;  // not laid out yet: its size comes, and calls again
    const [width, height] = [plot.inner_width, plot.inner_height].map((n) => Math.round(n * devicePixelRatio));
    const [x0, x1] = [plot.x_range.start, plot.x_range.end];
    const [y0, y1] = [Math.min(plot.y_range.start, plot.y_range.end), Math.max(plot.y_range.start, plot.y_range.end)];
    const row = plot.x_range.reset_end ?? x1;
    const style = getComputedStyle(document.documentElement);
    const color = (name) => rgb(style.getPropertyValue(name).trim());
    const palette = looks.palettes[Number(document.body.dataset.colors ?? 0)].map(rgb);
    palette[0] = color("--idle");
    let [image] = picture.data.image;
    if (image.shape[0] !== height || image.shape[1] !== width)
      image = new image.constructor(new Uint32Array(width * height).buffer, [height, width]);
    paint(image, width, height, {x0, x1, y0, y1, row}, blocks.data, start, base, palette, color("--text"));
    picture.setv({data: {image: [image], x: [x0], y: [y0], dw: [x1 - x0], dh: [y1 - y0]}}, {sync: false, check_eq: false});
    weir.map.painted = blocks.data.size.length;
  }

  return {
    painted: 0,  // blocks in the picture
    sums,
    paint,
    // Paint again, once whatever is under way has been applied.
    show(given) {
      models = given;
      this.again();
    },
    again() {
      if (!models || soon) return;
      soon = true;
      queueMicrotask(draw);
    },
    // What lies at a place.  what: address, size, state, stream or blocks.
    tell(what, x, y) {
      const byte = Math.floor(y) * (models.plot.x_range.reset_end ?? models.plot.x_range.end) + x;
      const {size, state, stream, count} = models.blocks.data;
      if (x < 0 || byte < 0 || byte >= start[start.length - 1]) return what === "address" ? "nothing is here" : "";
      const at = holder(start, byte), segment = holder(base, start[at]);
      switch (what) {
        case "address": return "0x" + BigInt(models.segments.data.address[segment] + start[at] - base[segment]).toString(16);
        case "size": return weir.bytes(size[at]);
        case "state": return models.looks.states[state[at]];
        case "stream": return names.get(stream[at]) ?? String(stream[at]);
        default: return String(count[at]);
      }
    },
  };
})();
