package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/isergate/isergate/gateway/units"
)

// maxFile bounds a configuration file, in bytes.
const maxFile = 1 << 20

// Parse reads the text of a configuration file. It returns the line of every key that it
// saw, by dotted path, and every fault: unknown and repeated keys, and values that are not what
// the key takes. It fills no defaults in.
func Parse(text []byte) (Config, map[string]int, []Fault) {
	var c Config
	p := parser{lines: map[string]int{}}
	if len(text) > maxFile {
		p.fault("", 0, "the configuration is larger than %d bytes", maxFile)
		return c, p.lines, p.faults
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var document yaml.Node
	if err := decoder.Decode(&document); err != nil {
		if !errors.Is(err, io.EOF) { // an empty file configures nothing
			p.syntax(err)
		}
		return c, p.lines, p.faults
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		p.fault("", 0, "the file holds more than one YAML document")
	}
	if document.Kind == yaml.DocumentNode && len(document.Content) == 1 {
		p.value("", document.Content[0], reflect.ValueOf(&c).Elem())
	}
	sort.SliceStable(p.faults, func(i, j int) bool { return p.faults[i].Line < p.faults[j].Line })
	return c, p.lines, p.faults
}

// parser walks the YAML tree and the configuration's type side by side.
type parser struct {
	lines  map[string]int
	faults []Fault
}

func (p *parser) fault(key string, line int, format string, args ...any) {
	p.faults = append(p.faults, Fault{Key: key, Line: line, Text: fmt.Sprintf(format, args...)})
}

var syntaxLine = regexp.MustCompile(`^yaml: line (\d+): (.*)$`)

func (p *parser) syntax(err error) {
	line, text := 0, strings.TrimPrefix(err.Error(), "yaml: ")
	if m := syntaxLine.FindStringSubmatch(err.Error()); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil {
			line, text = n, m[2]
		}
	}
	p.fault("", line, "not YAML: %s", text)
}

var (
	sizeType     = reflect.TypeFor[units.Size]()
	durationType = reflect.TypeFor[time.Duration]()
	portalsType  = reflect.TypeFor[[]Portal]()
)

func (p *parser) value(key string, node *yaml.Node, into reflect.Value) {
	if node.Kind == yaml.AliasNode || node.Anchor != "" {
		p.fault(key, node.Line, "anchors and aliases are not used here: write the value out")
		return
	}
	if node.Kind == yaml.ScalarNode && node.Tag == "!!null" {
		return // a key without a value keeps its default
	}
	switch {
	case into.Type() == portalsType:
		p.portals(key, node, into)
	case into.Kind() == reflect.Struct:
		p.mapping(key, node, into)
	case node.Kind != yaml.ScalarNode:
		p.fault(key, node.Line, "takes one value, not a list or a mapping")
	default:
		p.scalar(key, node, into)
	}
}

func (p *parser) mapping(key string, node *yaml.Node, into reflect.Value) {
	if node.Kind != yaml.MappingNode {
		if key == "" {
			key = "the file"
		}
		p.fault(key, node.Line, "takes keys with values")
		return
	}
	fields := map[string]reflect.Value{}
	var names []string
	for i := range into.NumField() {
		name := into.Type().Field(i).Tag.Get("yaml")
		fields[name] = into.Field(i)
		names = append(names, name)
	}
	for i := 0; i+1 < len(node.Content); i += 2 {
		name, value := node.Content[i], node.Content[i+1]
		path := name.Value
		if key != "" {
			path = key + "." + name.Value
		}
		field, known := fields[name.Value]
		if name.Kind != yaml.ScalarNode || !known {
			p.fault(path, name.Line, "unknown key: known here are %s", strings.Join(names, ", "))
			continue
		}
		if before, twice := p.lines[path]; twice {
			p.fault(path, name.Line, "is already set in line %d", before)
			continue
		}
		p.lines[path] = name.Line
		p.value(path, value, field)
	}
}

func (p *parser) portals(key string, node *yaml.Node, into reflect.Value) {
	nodes := node.Content
	if node.Kind == yaml.ScalarNode {
		nodes = []*yaml.Node{node}
	} else if node.Kind != yaml.SequenceNode {
		p.fault(key, node.Line, "takes a list of %s", PortalSyntax)
		return
	}
	var portals []Portal
	for _, item := range nodes {
		if item.Kind != yaml.ScalarNode {
			p.fault(key, item.Line, "takes a list of %s", PortalSyntax)
			continue
		}
		portal, err := ParsePortal(item.Value)
		if err != nil {
			p.fault(key, item.Line, "%v", err)
			continue
		}
		portals = append(portals, portal)
	}
	into.Set(reflect.ValueOf(portals))
}

func (p *parser) scalar(key string, node *yaml.Node, into reflect.Value) {
	switch into.Type() {
	case sizeType:
		size, err := units.ParseSize(node.Value)
		if err != nil {
			p.fault(key, node.Line, "%v", err)
			return
		}
		into.SetInt(int64(size))
		return
	case durationType:
		duration, err := time.ParseDuration(node.Value)
		if err != nil {
			p.fault(key, node.Line, "%q is no duration: write for example 500ms, 10s or 1h", node.Value)
			return
		}
		into.SetInt(int64(duration))
		return
	}
	switch into.Kind() {
	case reflect.String:
		into.SetString(node.Value)
	case reflect.Bool:
		if node.Tag != "!!bool" {
			p.fault(key, node.Line, "%q is neither true nor false", node.Value)
			return
		}
		into.SetBool(strings.EqualFold(node.Value, "true"))
	case reflect.Int:
		number, err := strconv.Atoi(node.Value)
		if err != nil {
			p.fault(key, node.Line, "%q is no whole number", node.Value)
			return
		}
		into.SetInt(int64(number))
	default:
		p.fault(key, node.Line, "cannot be set")
	}
}
